"""The ``lm`` policy: a light language model that weighs action texts by their token probabilities."""
