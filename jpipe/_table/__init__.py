"""The table of a schedule: its cells, rules, facts and text."""
