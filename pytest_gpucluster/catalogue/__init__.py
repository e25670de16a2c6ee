"""Every metric of this project: its name, its unit, which way is better, and what the number means."""
