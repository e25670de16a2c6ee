"""Two runs beside each other: what has become better or worse, and what cannot be told. Pure."""
