"""What measures the library: `python -m thinwire_lab.studies.planner --help`, and so on."""
