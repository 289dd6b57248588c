"""What may come in: one list of rules. An operation raises them; a linear layer that leaves a call
to the framework gives the same text as its reason.
"""
