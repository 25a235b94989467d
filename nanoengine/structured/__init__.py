"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

``grammar.py`` is what a request asks for, ``compiler.py`` makes a matcher of it on threads of its own (``matcher.py``),
once that has gone well in a process that can be ended (``trial.py``); ``gate.py`` is where the request waits for that,
``constraints.py`` follows each sequence's tokens and says which may come next,
``masks.py`` is how that is written down for the sampler.
The grammar library is llguidance; docs/structured-output.md has what was measured.
"""
