"""The paper's claims as judged experiments: many runs, one verdict.

Read in this order: schema (the file), load, execute (runs), measures, judge, page.
"""
