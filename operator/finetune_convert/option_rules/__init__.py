"""Contains one table of rules per tool: a field of the job for each option, or the reason why it is not taken over.

An option without a rule is converted by a function in `formats`.
"""
