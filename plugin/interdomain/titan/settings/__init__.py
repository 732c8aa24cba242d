"""The settings of a run: their schema, and how a TOML file and flags are read."""
