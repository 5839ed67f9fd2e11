"""How clients reach the store: the wire format, the data plane and the HTTP control plane."""
