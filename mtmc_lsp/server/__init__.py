"""The language server: the same search as the command line's, from any editor.

One module per protocol feature in ``features``; what they share is here. Runs happen in a process of their own
(``host.py``), so this one never imports torch, triton or user code, and a run can be ended at any moment.
"""
