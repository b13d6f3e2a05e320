// Shared by all that draws: elements by id, and SVG.

export const $ = (id) => document.getElementById(id);

/** Return an element with text, which never becomes markup. */
export function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

/** Return an element of an SVG. */
export function shape(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** Set the text of an element. A screen reader announces a status each time it is set, so only if it differs. */
export function say(id, text) {
  if ($(id).textContent !== String(text)) $(id).textContent = text;
}

/** Say below a field what is wrong with it. Without a field, nothing is. */
export function refuse(id, fields, field, message) {
  for (const each of fields) each.ariaInvalid = each === field ? "true" : null;
  const place = field?.closest("p");
  if (place && place !== $(id).parentNode) place.append($(id));
  say(id, field ? message : "");
}

/** Give an element exactly the classes whose value is true. */
export function classes(element, names) {
  element.className = Object.keys(names).filter((name) => names[name]).join(" ");
}

/** Return the root mean square of numbers, the unit of their shades. */
export const unit = (numbers) => Math.sqrt(numbers.reduce((sum, x) => sum + x * x, 0) / Math.max(1, numbers.length)) || 1;

/** Return numbers as shades, one above the other, in a picture that is 10 high. kind: "keys" or "values" */
export function shades(numbers, kind, [x, width], strength = 1, scale = unit(numbers)) {
  const column = shape("g", { class: kind, opacity: strength });
  const height = 10 / numbers.length;
  numbers.forEach((number, row) => {
    const shade = Math.min(1, Math.max(0, 0.5 + number / (4.4 * scale)));
    column.append(shape("rect", { x, y: row * height, width, height, opacity: 0.06 + 0.9 * shade ** 1.4 }));
  });
  return column;
}
