"""pytest's side of a run: options, start, phases of each test, verdict, reporting, end."""
