"""What a browser sees in a picture."""

COLORS = """async (png) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  return [image.width, image.height, [...new Set(new Uint32Array(data.buffer))]];
}"""
"""A function of a PNG in base64 that returns its width, its height and its colours."""
COUNTS = """async (png) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  return [...document.querySelectorAll(".plot")].map((plot) => {
    const { x, y, width, height } = plot.getBoundingClientRect();
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context.drawImage(image, -Math.round(x + scrollX), -Math.round(y + scrollY));
    return new Set(new Uint32Array(context.getImageData(0, 0, width, height).data.buffer)).size;
  });
}"""
"""A function of a PNG of the whole page, in base64, that counts the colours of each plot."""
