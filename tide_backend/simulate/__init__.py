"""Answers by calculation what no test machine can: large jobs, costs of decisions, quality of solvers.

Run ``python -m tide_backend.simulate --help`` for the subjects. Every output says which numbers are
calibrated and which are predicted; none of them is a measurement of hardware.
"""
