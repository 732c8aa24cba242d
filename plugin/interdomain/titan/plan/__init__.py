"""Everything that is computed and checked before anything expensive is built."""
