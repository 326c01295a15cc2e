"""Generated from the models: CRD, CEL rules, JSON schema, field reference and validation messages."""
