"""The rehearsal: the program itself, on devices that hold no numbers and in groups that reach nobody.

Imported by its commands only (`commands/rehearse.py`, `commands/calibrate.py`).
"""
