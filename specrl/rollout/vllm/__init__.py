"""Everything that reaches into vLLM, and the only package that imports it.

It replaces vLLM's sampler, drafts from several sources, changes the draft length while the engine runs, loads weights
in place, and adds FP8 layers and sleep. It names attributes that vLLM does not promise to keep, so it is written for
one version and its V1 model runner; on any other version `engine.lifecycle.require_version` refuses to start.
"""
