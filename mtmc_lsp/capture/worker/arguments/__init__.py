"""The arguments of a call: their structure, their example values, and how a capture describes them."""
