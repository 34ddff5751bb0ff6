"""The one program that runs every table; `engine.py` lists the parts."""
