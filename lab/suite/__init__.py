"""The task suite as a whole: a survey, an audit, an export of rows."""
