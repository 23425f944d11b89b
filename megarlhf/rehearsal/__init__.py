"""Rehearsals: the program itself runs on devices that hold no numbers and in process groups without other members.

Only its commands import this room (`commands/rehearse.py`, `commands/calibrate.py`).
"""
