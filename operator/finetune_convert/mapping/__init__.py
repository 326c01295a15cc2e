"""Maps options to fields of a job: rules, converters, and settings that depend on each other."""
