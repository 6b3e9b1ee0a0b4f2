"""One job: rounds carried out, a folder that appears whole or not at all."""
