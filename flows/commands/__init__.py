"""The subcommands of `specrl`; `flows.cli` lists them."""
