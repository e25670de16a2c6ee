"""A cluster that is described and not there: its devices, drivers and files, behind the seams of device and node."""
