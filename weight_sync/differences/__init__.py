"""What differs between two stores of weights, and how one tensor comes from the other."""
