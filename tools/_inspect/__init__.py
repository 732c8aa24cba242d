"""Parts of the command inspect-model."""
