"""Grade submissions: find the exercises of the course, run each answer in a sandbox, write a page and a CSV."""
