"""What many nodes have told of themselves by ``gpucluster info``, and in what they differ. Pure, but for reading."""
