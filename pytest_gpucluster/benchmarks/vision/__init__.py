"""Training on images: the ResNets, the data sets and their loader, and how many images a second a GPU takes."""
