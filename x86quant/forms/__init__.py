"""How a graph is called, and which calls it holds for: as values that compare, print and pickle."""
