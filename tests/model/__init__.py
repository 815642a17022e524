"""A model of the flag protocol that runs the product's own plans.

`programs` turns plans and an application's calls into threads of small operations; `memory` says what
bytes hold, as symbols; `rules` are the protocol's rules, so that a test can break one; `causal` explores
every choice that matters and finds races by happens-before; `interleaving` runs the same operations in
literally every order, for programs small enough, and must agree; `mutations` are the mistakes that both
have to find.
"""
