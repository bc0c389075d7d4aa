"""Commands: the subcommands of `trainwright` that use the whole package. `__main__.py` registers them."""
