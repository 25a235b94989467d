"""A discrete-event simulator of fleets: the router of ``deployments.routing``, unchanged, beside others' rules.

``python -m loadtest.router`` compares them. Seconds are the model's, not a machine's: what it tells is the order.
"""
