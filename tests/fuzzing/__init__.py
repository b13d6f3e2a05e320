"""What tests/fuzz.py is made of.

calls.py  what is drawn: calls of the scripts, damage of files, faults of the machine, kills
world.py  the folder in which a call is made, and the damage
rule.py   what must be true after a call
forks.py  a server that runs a script in milliseconds
"""
