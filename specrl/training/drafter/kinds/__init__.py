"""The kinds of drafters as torch modules, and their layers."""
