"""A discrete-event simulator of a fleet that follows its load: the policy of ``deployments.autoscaling``, unchanged and
behind Serve's own delays, beside others' rules.

``python -m loadtest.autoscale`` compares them. Seconds are the model's, not a machine's: what it tells is the order.
"""
