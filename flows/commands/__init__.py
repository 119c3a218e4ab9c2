"""The subcommands of `specrl`; each module's `register(app)` adds its own."""
