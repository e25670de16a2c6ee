"""Training on images: the ResNets, the data sets and their loader, and the rate of images a second."""
