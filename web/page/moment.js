// A moment of the lesson in the address, so that a teacher can link to it. All numbers count from 1.
//
//   at        how many characters the text has
//   layer, head
//   take      step 1: the column that is taken out
//   change    step 3: the character that is changed; to: what it is changed to
//   mistake   step 4
//   projector whether the page is large

const NUMBERS = ["at", "layer", "head", "take", "change"];
const WORDS = ["to", "mistake", "projector"];

/** Return the moment in the address, without the entries that the address does not have. */
export function readMoment() {
  const query = new URLSearchParams(location.search);
  const moment = {};
  for (const name of NUMBERS) if (/^[1-9]\d{0,8}$/.test(query.get(name))) moment[name] = Number(query.get(name));
  for (const name of WORDS) if (query.get(name)) moment[name] = query.get(name);
  return moment;
}

/** Put a moment into the address, next to the form. Entries that are null or undefined are left out. */
export function writeMoment(moment) {
  const query = new URLSearchParams(location.search);
  for (const name of [...NUMBERS, ...WORDS]) query.delete(name);
  for (const [name, value] of Object.entries(moment)) if (value != null) query.set(name, value);
  history.replaceState({ isMoment: true }, "", (query.size ? `?${query}` : location.pathname) + location.hash);
}
