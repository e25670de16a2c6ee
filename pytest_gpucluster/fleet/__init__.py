"""The runs of many nodes, each of which ran the suite alone, as one picture. Pure but for reading files."""
