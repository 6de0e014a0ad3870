"""Seeded mutations: small faults that break a law each, and a tool that says whether the tests catch them.

    python -m tests.mutations                       # all, nearby tests first, then the rest of the default tier
    python -m tests.mutations --only rate --near    # those with "rate" in their name, nearby tests only
    python -m tests.mutations --area sql --area query

`seeds` has the mutations, `areas` says which tests are near which code. A mutation that survives is a hole in the
tests: add the test of its law. When code moves, `test_seeds` says which texts are no more found.
"""
