"""The kinds of drafters as torch modules, and the layers that they are built of."""
