// The two pickles that Java handles: it reads the plan out of a partition's, and writes the one that
// hands the rest of a partition back to Python.
//
// Python pickles a planned partition as a call: from_plan(json, first, last, position).  Java writes the
// same call with other numbers.  Its arguments are what sparkconnector/plan.py says.
package pk.reader;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import net.razorvine.pickle.IObjectConstructor;
import net.razorvine.pickle.Unpickler;

final class Pickles {
  private static final String MODULE = "pk.sparkconnector.plan";
  private static final String FUNCTION = "from_plan";

  private Pickles() {}

  private static final class Call {
    final String json;

    Call(String json) {
      this.json = json;
    }
  }

  static {
    IObjectConstructor constructor =
        arguments ->
            new Call(arguments.length > 0 && arguments[0] instanceof String
                ? (String) arguments[0] : null);
    Unpickler.registerConstructor(MODULE, FUNCTION, constructor);
  }

  /** Returns the plan in a partition's pickle; null if there is none, for whatever reason. */
  static String planIn(byte[] pickle) {
    // Any other partition would make the unpickler build objects of classes that it does not know.
    if (indexOf(pickle, FUNCTION.getBytes(StandardCharsets.US_ASCII)) < 0) {
      return null;
    }
    try {
      Object found = new Unpickler().loads(pickle);
      return found instanceof Call ? ((Call) found).json : null;
    } catch (Exception cause) {
      return null; // Python reads what this jar cannot
    }
  }

  private static int indexOf(byte[] text, byte[] part) {
    for (int at = 0; at + part.length <= text.length; at++) {
      int same = 0;
      while (same < part.length && text[at + same] == part[same]) {
        same++;
      }
      if (same == part.length) {
        return at;
      }
    }
    return -1;
  }

  /** Returns from_plan(json, first, last, position) as a pickle of protocol 2. */
  static byte[] rest(String json, int first, int last, long position) {
    byte[] text = json.getBytes(StandardCharsets.UTF_8);
    ByteArrayOutputStream out = new ByteArrayOutputStream(text.length + 128);
    out.writeBytes(new byte[] {(byte) 0x80, 2});
    out.writeBytes(("c" + MODULE + "\n" + FUNCTION + "\n(X").getBytes(StandardCharsets.US_ASCII));
    out.writeBytes(little(4).putInt(text.length).array());
    out.writeBytes(text);
    for (int number : new int[] {first, last}) {
      out.write('J');
      out.writeBytes(little(4).putInt(number).array());
    }
    out.writeBytes(new byte[] {(byte) 0x8a, 8});
    out.writeBytes(little(8).putLong(position).array());
    out.writeBytes("tR.".getBytes(StandardCharsets.US_ASCII));
    return out.toByteArray();
  }

  private static ByteBuffer little(int size) {
    return ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN);
  }
}
