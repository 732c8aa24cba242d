"""Parts of the command study."""
