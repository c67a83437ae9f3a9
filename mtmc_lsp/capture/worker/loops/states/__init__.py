"""States of a loop that are not plain variables: attributes of objects, and dataclasses."""
