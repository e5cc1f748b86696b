"""Several devices behind one node: their models are averaged there first."""
