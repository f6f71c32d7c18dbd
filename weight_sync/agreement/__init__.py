"""Module by module: whether two implementations of a model compute the same. The parts of the parity command."""
