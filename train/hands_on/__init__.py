"""The hands-on as programs: an exercise with gaps, and its answers. `docs/hands_on.md` has the questions."""
