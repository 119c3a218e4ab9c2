"""The policy in Megatron-core, which nothing else imports."""

import specrl.training.megatron.cpu_shim  # noqa: F401  (before Megatron-core is imported)
