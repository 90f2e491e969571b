"""What is a mixer good at? Its abilities as numbers, beside other mixers."""
