"""Everything that is computed and refused before anything expensive is built."""
