"""Several runs: compared, merged, side by side as a fleet, compared with other programs, and certified."""
