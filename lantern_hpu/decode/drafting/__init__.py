"""Where drafts come from. A drafting owns its part of the state; the step knows none of its fields."""
